"""LangChain models over an asyncllm engine in the same process."""

from langchain_asyncllm.chat_model import ChatAsyncLLM
from langchain_asyncllm.llm import AsyncLLM

__all__ = ["AsyncLLM", "ChatAsyncLLM"]
