"""The engine's core: plain synchronous Python, without torch and without asyncio."""
