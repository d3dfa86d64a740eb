"""Video: prompts, pictures and clips in, frames and files out."""
