"""Video: prompts, images and clips in, frames and files out."""
