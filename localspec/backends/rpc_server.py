"""A server that lends this machine's devices to llama.cpp: ``python -m localspec.backends.rpc_server``.

The same as llama.cpp's own ``rpc-server``, from the libraries that are installed here. It serves one client at a time,
and has no protection of any kind: anyone who reaches its port can read and write the memory of this process.
"""

from __future__ import annotations

import argparse
import signal
import sys

from localspec.backends.llama.ggml import CPU, GPU
from localspec.backends.llama.rpc import checked_address, rpc
from localspec.errors import LocalspecError, UsageError
from localspec.system.machine import default_threads, prepare_threads


def main() -> int:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=50052)
    parser.add_argument("--threads", type=int, default=default_threads(), metavar="N", help="for the CPU")
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="as doctor names it; the GPUs, or else the CPU"
    )
    parser.add_argument("--allow-insecure-rpc", action="store_true", help="listen on other addresses than loopback")
    args = parser.parse_args()
    try:
        endpoint = checked_address(f"{args.host}:{args.port}", args.allow_insecure_rpc)
        prepare_threads()
        found = {each.name: each for each in rpc().ggml.devices()}
        names = args.device or [each.name for each in found.values() if each.kind == GPU]
        names = names or [each.name for each in found.values() if each.kind == CPU][:1]
        if unknown := [name for name in names if name not in found]:
            raise UsageError(f"--device {unknown[0]}: there is {', '.join(found)}")
    except (LocalspecError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it never comes back to Python, which would raise
    print(f"serving {', '.join(names)} at {endpoint}, unencrypted and unauthenticated", file=sys.stderr, flush=True)
    rpc().serve(endpoint, args.threads, [found[name].handle for name in names])
    print(f"the server stopped; check that port {args.port} is free", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
