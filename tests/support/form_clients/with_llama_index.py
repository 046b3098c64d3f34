"""LlamaIndex: a structured LLM of a class, by a call and by a JSON schema."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


options = {"model": "default", "api_base": sys.argv[1], "api_key": "none", "is_chat_model": True, "max_tokens": 200}
ask = "Maria Keller is 34 years old. Extract name and age."
calling = OpenAILike(**options, is_function_calling_model=True)
program = FunctionCallingProgram.from_defaults(
    output_cls=Person, prompt_template_str="{text}", llm=calling, tool_required=True
)
called = program(text=ask)
structured = calling.as_structured_llm(Person).chat([ChatMessage(role="user", content=ask)]).raw
assert isinstance(called, Person)
assert isinstance(structured, Person)
print(json.dumps({"program": called.model_dump(), "structured": structured.model_dump()}))
