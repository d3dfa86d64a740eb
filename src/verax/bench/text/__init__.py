"""Text generation compared with transformers and llama.cpp: `verax bench text`, `verax bench quality`."""
