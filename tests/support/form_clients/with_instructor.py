"""instructor: a response model, by a tool and by a JSON schema."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


ask = [{"role": "user", "content": "Maria Keller is 34 years old. Extract name and age."}]
found = {}
for name, mode in (("tools", instructor.Mode.TOOLS), ("json_schema", instructor.Mode.JSON_SCHEMA)):
    client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1], api_key="none"), mode=mode)
    own = client.chat.completions.create(
        model="default", messages=ask, response_model=Person, max_tokens=200, max_retries=0
    )
    assert isinstance(own, Person)
    found[name] = own.model_dump()
print(json.dumps(found))
