"""The OpenAI endpoints over an engine, with FastAPI: packages of the extra ``[serve]``."""
