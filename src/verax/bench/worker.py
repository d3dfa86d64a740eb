"""Process of a side of a benchmark, run by a Python that need not have verax.

Its argument is the path of a Python file with a function for each package that it drives, of the package's name. It
reads a JSON object a line from standard input and answers each with one on standard output:

1. `engine`, the name of such a function, whose package is imported;
2. the arguments of the engine's function after the package. The function returns a run and the `versions` of what
   runs, which the answer has;
3. again and again, the arguments of the run. The answer has its `result`, its `seconds`, and the process's peak memory,
   `peak_bytes`.

An answer with `error` says what failed, one with `missing` which package is not installed. For example:

    {"engine": "vllm"}                                                      {}
    {"model": "Qwen3-0.6B", "dtype": "bfloat16", ...}                       {"versions": {"vllm": "0.32.0"}}
    {"prompts": [[5, 6]], "max_tokens": [2], "temperature": 0.0}            {"result": [[7, 8]], "seconds": 0.1, ...}
"""

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def peak_bytes(process: int | str = "self") -> int:
    """Bytes of the peak memory of a process, by its id; 0 where the system does not keep them."""
    # Not getrusage's: it counts what the process that started this one had held.
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    engines = runpy.run_path(sys.argv[1])
    name, package, run = "", None, None
    for line in sys.stdin:
        request, answer, begin = json.loads(line), dict[str, Any](), time.perf_counter()
        try:
            if package is None:
                name = request["engine"]
                package = importlib.import_module(name)
            elif run is None:
                run, answer["versions"] = engines[name](package, **request)
            else:
                answer["result"] = run(**request)
                answer |= {"seconds": time.perf_counter() - begin, "peak_bytes": peak_bytes()}
        except ModuleNotFoundError as error:
            answer = {"missing": error.name}
        except Exception as error:  # the reader of the answer raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
