"""DSPy: a signature with typed outputs, which its JSON adapter asks for as a schema."""

import json
import sys

import dspy


class Extract(dspy.Signature):
    """Extract the person's name and age."""

    text: str = dspy.InputField()
    name: str = dspy.OutputField()
    age: int = dspy.OutputField()


model = dspy.LM("openai/default", api_base=sys.argv[1], api_key="none", max_tokens=200, cache=False)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
own = dspy.Predict(Extract)(text="Maria Keller is 34 years old.")
assert isinstance(own.age, int)
print(json.dumps({"json": {"name": own.name, "age": own.age}}))
