"""Code that runs inside vLLM's processes; it imports nothing of the project that launches it."""
