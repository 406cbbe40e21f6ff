"""A hub for tests: it speaks Hugging Face's protocol on loopback and fails on demand."""
