"""pdstack: the typed, pure core of the bundle (standard library only, Python 3.9 syntax).

Nothing here does input or output at import time. Code that touches the machine takes its
filesystem root, its library loader, its runner and its clock as arguments.
"""
