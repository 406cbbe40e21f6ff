"""Decode kernels for DeepSeek-V4-Flash on consumer Blackwell (sm_120), and their SGLang plugin."""

__version__ = "0.1.0"
