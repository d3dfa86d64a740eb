"""The stages of a video pipeline beside diffusers: `verax bench video`, `verax bench teacache`."""
