"""pydantic-ai: an agent with an output type, by a tool and by the server's own JSON schema."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
profile = OpenAIModelProfile(supports_json_schema_output=True)
model = OpenAIChatModel("default", provider=provider, profile=profile)
found = {}
for name, output in (("tool", Person), ("native", NativeOutput(Person))):
    agent = Agent(model, output_type=output, model_settings={"max_tokens": 200}, retries=0)
    own = agent.run_sync("Maria Keller is 34 years old. Extract name and age.").output
    assert isinstance(own, Person)
    found[name] = own.model_dump()
print(json.dumps(found))
