"""Folders of SkyReels-V2 and Wan models, in either published layout."""
