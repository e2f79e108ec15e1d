"""llama.cpp as a peer of benchmarks/engine.py: its server inside this process, through xllamacpp.

    python benchmarks/peers/llama_cpp.py MODEL.gguf --format f16 --context 17000 --threads 2

Needs only xllamacpp (`pip install xllamacpp`), which may be that of another environment: the
benchmark runs this file with the Python that `--peer` names and talks to it in lines of JSON, one
answer for each request:

    {"do": "fill", "ids": [...], "name": "a"}       read a prompt and keep its state under a name;
                                                    what it shares with the one before is kept
    {"do": "prompt", "name": "a", "ids": [...]}     from that state, read more: {"ms", "tokens"}
    {"do": "generate", "name": "a", "tokens": n}    from that state, n tokens: {"ms_per_token"}

Times are the server's own (`timings` of its /completion), without HTTP and JSON. Flash attention is
on, as llama.cpp has it by default; keys and values have the same type.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

NEAR = 16  # tokens


class LlamaCpp:
    """A server with one slot, whose states lie in files of `folder`."""

    def __init__(self, model: str, fmt: str, context: int, threads: int, folder: str) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{fmt.upper()}")
        params.cache_type_k = params.cache_type_v = kind
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.warmup, params.fit_params, params.verbosity = False, False, 0
        params.slot_save_path = folder + os.sep
        params.endpoint_slots = True
        self.server = xllamacpp.Server(params)
        self.prompts: dict[str, list[int]] = {}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def complete(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """The server's timings of a prompt and `tokens` new ones."""
        asked = {"prompt": ids, "n_predict": tokens, "cache_prompt": True, "ignore_eos": True,
                 "temperature": 0.0, "id_slot": 0}  # fmt: skip
        timings: dict[str, Any] = self.post("/completion", asked)["timings"]
        return timings

    def fill(self, ids: list[int], name: str) -> dict[str, Any]:
        timings = self.complete(ids, 0)
        self.post("/slots/0?action=save", {"filename": name})
        self.prompts[name] = ids
        return {"ms": timings["prompt_ms"], "tokens": timings["prompt_n"]}

    def after(self, name: str, ids: list[int], tokens: int) -> dict[str, Any]:
        """Timings of `ids` and `tokens` new ones after a state that was kept."""
        self.post("/slots/0?action=restore", {"filename": name})
        timings = self.complete(self.prompts[name] + ids, tokens)
        again = timings["prompt_n"] - len(ids)  # it goes back to a checkpoint near the end
        if again > NEAR:
            raise RuntimeError(f"the state {name} was not restored: {again} of its tokens read")
        return timings

    def prompt(self, name: str, ids: list[int]) -> dict[str, Any]:
        timings = self.after(name, ids, 1)
        return {"ms": timings["prompt_ms"], "tokens": timings["prompt_n"]}

    def generate(self, name: str, tokens: int) -> dict[str, Any]:
        # The server counts the first new token to the prompt.
        timings = self.after(name, [9], tokens + 1)
        return {"ms_per_token": timings["predicted_ms"] / (timings["predicted_n"] - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--format", default="f16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library may print
    with tempfile.TemporaryDirectory() as folder:
        peer = LlamaCpp(
            str(Path(args.model).resolve()), args.format, args.context, args.threads, folder
        )
        version = getattr(xllamacpp, "__version__", "unknown")
        print(json.dumps({"version": version}), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(peer, request.pop("do"))(**request)
            print(json.dumps(answer), file=answers, flush=True)
        answers.flush()
        os._exit(0)  # a server that is closed hangs now and then


if __name__ == "__main__":
    main()
