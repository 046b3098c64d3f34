"""LangChain: ``with_structured_output`` by a JSON schema, by a call, and by the JSON mode."""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


model = ChatOpenAI(model="default", base_url=sys.argv[1], api_key="none", max_tokens=200, max_retries=0)
ask = "Maria Keller is 34 years old. Extract her name and age as a JSON object with the keys name and age."
found = {}
for method in ("json_schema", "function_calling", "json_mode"):
    own = model.with_structured_output(Person, method=method).invoke(ask)
    assert isinstance(own, Person)
    found[method] = own.model_dump()
print(json.dumps(found))
