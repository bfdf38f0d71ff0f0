"""Renderers, tested on graphs made by hand."""
