"""Wan 2.1 and SkyReels-V2: the diffusion transformer and the video VAE."""
