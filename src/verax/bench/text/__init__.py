"""Text generation beside transformers and llama.cpp: `verax bench text`, `verax bench quality`."""
