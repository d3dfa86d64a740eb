"""Images and clips from clients: data URIs, and decoding in a process of its own."""
