"""What is sent: prompts of wanted lengths, their answers' lengths, and arrival times. Deterministic from a seed.

There is no tokenizer here: prompts are words, and how many tokens a word costs is measured on the server
(``calibrate``), whose ``usage`` is what counts in the end.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

# Frequent English words: one token each in the vocabularies of large models.
_FREQUENT = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house service
    friend father power hour game line end member law car city community name president team minute idea body
    information back parent face others level office door health person art war history party result change morning
    reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan
    college interest death course someone experience behind reach local six remain effect large simple early field
"""
WORDS = _FREQUENT.split()
FIXED, SHAREGPT_LIKE = "fixed", "sharegpt-like"
# ShareGPT as the vLLM paper has it (arXiv 2309.06180, figure 11): mean prompt 161, mean answer 338 tokens, long tails.
# A log-normal has that mean at mu = ln(mean) - sigma^2 / 2.
SHAREGPT_MEANS = (161.0, 338.0)
SHAREGPT_SIGMA = 1.0
SHAREGPT_LIMITS = (4, 1024)


class WorkloadError(ValueError):
    """A workload that cannot be sent: what was found, what is needed."""


@dataclass(frozen=True)
class Workload:
    """What one measurement sends. ``dataset`` is fixed, sharegpt-like, or the name of the user's file."""

    dataset: str = FIXED
    input_len: int = 256  # tokens; of fixed
    output_len: int = 128  # tokens; of fixed, and where a line of a file names none
    requests: int = 96
    shared_prefix: float = 0.0  # share of each prompt that is the same in all of them: 0 is a cold prefix cache
    seed: int = 1
    salt: str = ""  # makes prompts of another run different, so that the prefix cache of the last one does not serve
    ignore_eos: bool = True  # answers have the asked length; off for a user's file by its own wish


@dataclass(frozen=True)
class Prompt:
    """One request: text, or chat messages of the user's file, and how long the answer may be."""

    text: str
    max_tokens: int
    messages: Tuple[Tuple[str, str], ...] = ()  # (role, content)


@dataclass(frozen=True)
class Calibration:
    """Tokens of a prompt of n words: ``overhead + per_word * n`` (a chat template and a BOS token are overhead)."""

    overhead: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Return how many words come nearest to a number of tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.per_word))


def calibration(few: Tuple[int, int], many: Tuple[int, int]) -> Calibration:
    """Return the line through two observations (words, tokens of ``usage``)."""
    (words_a, tokens_a), (words_b, tokens_b) = few, many
    if words_b <= words_a or tokens_b <= tokens_a:
        raise WorkloadError(
            f"{words_a} words were {tokens_a} tokens and {words_b} words {tokens_b}; needed: more words, more tokens"
        )
    per_word = (tokens_b - tokens_a) / (words_b - words_a)
    return Calibration(max(0.0, tokens_a - per_word * words_a), per_word)


def words(count: int, source: random.Random) -> str:
    """Return ``count`` random words."""
    return " ".join(source.choice(WORDS) for _ in range(count))


def lengths(workload: Workload) -> List[Tuple[int, int]]:
    """Return (prompt, answer) lengths in tokens. The same for the same seed, whatever the salt."""
    if workload.dataset == FIXED:
        return [(workload.input_len, workload.output_len)] * workload.requests
    source = random.Random(f"lengths {workload.seed}")
    low, high = SHAREGPT_LIMITS

    def draw(mean: float) -> int:
        value = source.lognormvariate(math.log(mean) - SHAREGPT_SIGMA**2 / 2, SHAREGPT_SIGMA)
        return max(low, min(high, round(value)))

    return [(draw(SHAREGPT_MEANS[0]), draw(SHAREGPT_MEANS[1])) for _ in range(workload.requests)]


def prompts(workload: Workload, line: Calibration) -> List[Prompt]:
    """Return the prompts of fixed and sharegpt-like workloads.

    Each starts with words of its own, or, with a shared prefix, with the words that all have in common.
    """
    source = random.Random(f"words {workload.seed} {workload.salt}")
    longest = max((line.words(tokens) for tokens, _ in lengths(workload)), default=0)
    common = words(longest, random.Random(f"prefix {workload.seed} {workload.salt}")).split()
    found = []
    for tokens, answer in lengths(workload):
        count = line.words(tokens)
        shared = int(count * workload.shared_prefix)
        found.append(Prompt(" ".join(common[:shared] + words(count - shared, source).split()), answer))
    return found


def warm_up(workload: Workload, line: Calibration, count: int) -> List[Prompt]:
    """Return prompts to send before the measurement: of the same lengths, other words, the same shared prefix."""
    other = Workload(**{**workload.__dict__, "requests": count})
    found = prompts(other, line)
    source = random.Random(f"warm-up {workload.seed} {workload.salt}")
    result = []
    for prompt in found:
        kept = int(len(prompt.text.split()) * workload.shared_prefix)
        mine = prompt.text.split()
        result.append(Prompt(" ".join(mine[:kept] + words(len(mine) - kept, source).split()), prompt.max_tokens))
    return result


def read_dataset(lines: Iterable[str], workload: Workload, name: str = "dataset") -> List[Prompt]:
    """Return the prompts of a JSONL file, one object a line; at most ``workload.requests``, repeated to reach it.

    Known shapes: ``prompt`` (text), ``messages`` (role and content), ``conversations`` (ShareGPT: from and value;
    the first human turn). ``max_tokens`` or ``output_len`` bounds the answer. Raises WorkloadError.
    """
    found: List[Prompt] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            found.append(_prompt(json.loads(text), workload.output_len))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise WorkloadError(
                f"{name} line {number}: {error or type(error).__name__}; needed: an object with prompt (text), "
                "messages or conversations, and max_tokens where the answer's length matters"
            ) from None
        if len(found) == workload.requests:
            break
    if not found:
        raise WorkloadError(f"{name} has no line; needed: one JSON object a line")
    return [found[index % len(found)] for index in range(workload.requests)]


def _prompt(value: Any, output_len: int) -> Prompt:
    if not isinstance(value, dict):
        raise WorkloadError("not a JSON object")
    answer = value.get("max_tokens", value.get("output_len", output_len))
    if not isinstance(answer, int) or isinstance(answer, bool) or answer < 1:
        raise WorkloadError(f"max_tokens is {answer!r}, not a positive number")
    if isinstance(value.get("prompt"), str) and value["prompt"]:
        return Prompt(value["prompt"], answer)
    if value.get("messages"):
        messages = tuple((str(item["role"]), str(item["content"])) for item in value["messages"])
        return Prompt(messages[-1][1], answer, messages)
    if value.get("conversations"):
        human = next(item for item in value["conversations"] if item.get("from") in ("human", "user"))
        return Prompt(str(human["value"]), answer)
    raise WorkloadError("no prompt, messages or conversations")


def arrivals(count: int, rate: float, seed: int) -> List[float]:
    """Return the times in seconds at which requests of an open loop leave: a Poisson process of ``rate`` a second."""
    if rate <= 0:
        raise WorkloadError(f"the rate is {rate}; needed: requests a second, above 0")
    source, now, found = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate)
        found.append(now)
    return found


def body(prompt: Prompt, model: str, chat: bool, ignore_eos: bool, stream: bool = True) -> Dict[str, Any]:
    """Return the request's JSON: greedy, and with the token counts at its end."""
    value: Dict[str, Any] = {"model": model, "max_tokens": prompt.max_tokens, "temperature": 0, "stream": stream}
    if stream:
        value["stream_options"] = {"include_usage": True}
    if ignore_eos:
        value["ignore_eos"] = True
    if chat:
        turns: Sequence[Tuple[str, str]] = prompt.messages or (("user", prompt.text),)
        value["messages"] = [{"role": role, "content": content} for role, content in turns]
    else:
        value["prompt"] = prompt.text
    return value


def describe(workload: Workload, rate: Optional[float] = None) -> str:
    """Return the workload in one line."""
    if workload.dataset == FIXED:
        shape = f"{workload.input_len} in / {workload.output_len} out"
    elif workload.dataset == SHAREGPT_LIKE:
        shape = "lengths like ShareGPT"
    else:
        shape = f"dataset {workload.dataset}"
    cache = f"{workload.shared_prefix:.0%} shared prefix" if workload.shared_prefix else "cold prefix cache"
    loop = f"open loop at {rate:g}/s" if rate else "closed loop"
    return f"{shape}, {workload.requests} requests, {cache}, {loop}"


def check(workload: Workload) -> None:
    """Refuse what cannot be sent. Raises WorkloadError."""
    for name in ("input_len", "output_len", "requests"):
        if getattr(workload, name) < 1:
            raise WorkloadError(f"{name} is {getattr(workload, name)}; needed: at least 1")
    if not 0 <= workload.shared_prefix < 1:
        raise WorkloadError(f"shared_prefix is {workload.shared_prefix}; needed: a share from 0 to below 1")
