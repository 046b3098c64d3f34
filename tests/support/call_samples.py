"""A call of ``weather`` with the city Paris in each format, as models write it."""

from __future__ import annotations

from edgespec.text.conversation import call_formats as formats
from edgespec.text.conversation.call_formats import CallFormat

PARIS = '{"city": "Paris"}'
OBJECT = f'{{"name": "weather", "arguments": {PARIS}}}'
FUNCTION = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"

SAMPLES: dict[str, tuple[CallFormat, str]] = {
    "qwen xml": (formats.QWEN_XML, f"<tool_call>\n{FUNCTION}\n</tool_call>"),
    "seed": (
        formats.SEED_OSS,
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
    ),
    "minimax": (
        formats.MINIMAX,
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    "deepseek xml": (
        formats.DEEPSEEK_XML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">'
        "Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "deepseek v4": (
        formats.DEEPSEEK_V4,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    "deepseek": (
        formats.DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{PARIS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": (
        formats.KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "harmony": (
        formats.HARMONY,
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
    ),
    "solar": (
        formats.SOLAR,
        "<|tool_calls|><|tool_call:begin|>call00000<|tool_call:name|>weather<|tool_call:args|>"
        f"{PARIS}<|tool_call:end|><|calls|>",
    ),
    "hunyuan": (
        formats.HUNYUAN,
        "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
    ),
    "glm": (formats.GLM, GLM),
    "minicpm": (formats.MINICPM, '<function name="weather"><param name="city">Paris</param></function>'),
    "functionary": (formats.FUNCTIONARY, f"<function=weather>{PARIS}</function>"),
    "gemma": (formats.GEMMA, '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'),
    "function gemma": (
        formats.FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>",
    ),
    "olmo": (formats.OLMO, '<function_calls>weather(city="Paris")</function_calls>'),
    "mistral listed": (formats.MISTRAL_LISTED, f"[TOOL_CALLS] [{OBJECT}]"),
    "mistral": (formats.MISTRAL, f"[TOOL_CALLS]weather[ARGS]{PARIS}"),
    "lfm2": (formats.LFM2, "<|tool_call_start|>[weather(city='Paris')]<|tool_call_end|>"),
    "cohere": (
        formats.COHERE,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{PARIS}}}\n]<|END_ACTION|>",
    ),
    "granite": (formats.GRANITE, f"<|tool_call|>[{OBJECT}]"),
    "listed": (formats.LISTED, f"<tool_calls>[{OBJECT}]</tool_calls>"),
    "nemotron": (formats.NEMOTRON, f"<TOOLCALL>[{OBJECT}]</TOOLCALL>"),
    "apertus": (formats.APERTUS, f'<|tools_prefix|>[{{"weather": {PARIS}}}]<|tools_suffix|>'),
    "gigachat": (formats.GIGACHAT, f"<|function_call|>{OBJECT}"),
    "gigachat 3": (formats.GIGACHAT_3, f"function call<|role_sep|>\n{OBJECT}"),
    "hermes": (formats.HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "llama": (formats.LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}'),
}
FORMATS = {name: form for name, (form, _) in SAMPLES.items()}
