"""Measuring the service: load, figures, comparison, report. Pure pieces, and one client over asyncio."""
