"""Talk to `edgespec serve` with OpenAI's own client; Ctrl-C stops the answer.

python examples/openai_client.py [URL] [PROMPT]
"""

from __future__ import annotations

import sys

from openai import OpenAI, OpenAIError


def main() -> int:
    """Stream one answer, and print how many of its tokens were guessed."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8471/v1"
    prompt = sys.argv[2] if len(sys.argv) > 2 else "Name three colours."
    client = OpenAI(base_url=url, api_key="none")
    try:
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        )
        with stream:  # leaving the block closes the connection, which ends the answer
            for chunk in stream:
                if chunk.choices:
                    print(chunk.choices[0].delta.content or "", end="", flush=True)
                elif chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
                    right = chunk.usage.completion_tokens_details.accepted_prediction_tokens
                    print(f"\n[{chunk.usage.completion_tokens} tokens, {right} guesses right]")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except OpenAIError as error:
        print(f"{error} (is `edgespec serve` running?)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
