"""Stages of a video pipeline compared with diffusers: `verax bench video`."""
