"""Makes, with verifiers, what run.yaml needs: numbers of tasks, words to guess where NLTK has none, and a tokenizer for
Qwen3's renderer with a token for each letter that can be guessed, each cell of the board and each line of the rules."""

import importlib.resources
import re
import string
from itertools import islice

import nltk
from players import NUM_TASKS, environment, folder
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

(folder / "tokenizer").mkdir(parents=True, exist_ok=True)
numbers = iter(range(sum(NUM_TASKS.values())))
for part, size in NUM_TASKS.items():
    rows = [f'{{"prompt": "game {i}", "seed": {i}}}\n' for i in islice(numbers, size)]
    (folder / f"{part}.jsonl").write_text("".join(rows))
try:
    nltk.data.find("corpora/words/en-basic")
except LookupError:
    words = folder / "nltk_data" / "corpora" / "words"
    words.mkdir(parents=True)
    dictionary = importlib.resources.files("textarena.envs.utils.data").joinpath("en_US.dic").read_text()
    (words / "en-basic").write_text("\n".join(re.findall(r"^[a-z]{4,6}\b", dictionary, re.MULTILINE)))

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
           "<tool_response>", "</tool_response>"]  # fmt: skip
TOLD = (
    "You attempted an invalid move. Reason: ",
    "Invalid move format. You did not respond with a valid 'letter' or 'word'.",
    "You guessed the letter '",
    "' which has already been guessed.",
    " Please resubmit a valid move and remember to follow the game rules to avoid penalties.",
    "user\n",
    "assistant\n",
)
"""What the game says of moves that are none, and the template of roles."""
tasks = environment().taskset.take(sum(NUM_TASKS.values()))
lines = {line for task in tasks for line in f"{task.data.system_prompt}\n{task.data.prompt}".split("\n")}
pieces = {
    **{character: -9.0 for character in string.printable[:95] + "\n"},
    **{f"[{letter}]": -5.0 for letter in string.ascii_uppercase},
    **{f"  {cell}{end}": -5.0 for cell in "_" + string.ascii_uppercase for end in ("", " ")},
    **{text: -1.0 for text in (*sorted(lines), *TOLD) if len(text.strip("_ ")) > 3},
}
tokenizer = Tokenizer(models.Unigram([(token, 0.0) for token in SPECIAL] + list(pieces.items()), unk_id=0))
tokenizer.decoder = decoders.Fuse()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL[1:]
).save_pretrained(folder / "tokenizer")
