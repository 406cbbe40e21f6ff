"""Bring a Hugging Face checkpoint to a host, prove every byte of it, and keep it right.

One direction of data::

    sources ──listing──▶ listing ─┐
    disk ──stat, manifest─────────┴─▶ plan (pure) ─▶ fetch ─▶ staging ─▶ sanity ─▶ rename

``listing`` is the trust root: a size and a digest per file at one commit. Because of it the bytes
may come from anywhere (hub, mirror, directory, peer). ``reconcile`` is the door for callers.
"""
