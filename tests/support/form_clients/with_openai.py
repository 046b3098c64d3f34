"""The openai package: ``parse`` with a model, and a forced call of a tool."""

import json
import sys

import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
ask = [{"role": "user", "content": "Maria Keller is 34 years old. Extract name and age."}]
parsed = client.beta.chat.completions.parse(model="default", messages=ask, response_format=Person, max_tokens=200)
tool = openai.pydantic_function_tool(Person, name="keep_person")
called = client.beta.chat.completions.parse(
    model="default", messages=ask, tools=[tool], tool_choice="required", max_tokens=200
)
person, call = parsed.choices[0].message.parsed, called.choices[0].message.tool_calls[0]
assert isinstance(call.function.parsed_arguments, Person)
print(json.dumps({"parse": person.model_dump(), "tool": json.loads(call.function.arguments)}))
