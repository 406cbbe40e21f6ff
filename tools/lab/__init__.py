"""Lab hosts: real systemd hosts on this machine, in network namespaces of their own.

A lab is a bridge in a namespace, an apt proxy to the machine's own mirrors, and hosts booted by
systemd-nspawn or podman from one cached base tree. See docs/lab.md. Standard library only,
Python 3.10 or newer (Ubuntu 22.04's own python3 must run it before anything is installed).
"""
