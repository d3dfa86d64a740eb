"""Clips over HTTP: jobs, files, media."""
