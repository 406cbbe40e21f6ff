"""Start an engine or a router with the keys that systemd hands to its unit.

    launch.py engine|sglang-router|smg ARGUMENT...

Both programs take keys as arguments, which every user of a host can read, so they are set here once the arguments
have been parsed. PDSTACK_CREDENTIALS names those that must be there: without one of them nothing starts. An engine
writes its whole configuration to its log and tells it at /server_info and elsewhere, keys included; both are kept back
here, in the processes that it spawns too, since each of them imports this file first.

An engine that was told to stop takes nothing new: see RefuseWhileStopping. The router's answers leave at once: see
send_at_once.
"""

import ctypes
import logging
import os
import platform
import signal
import socket
import sys
import time

ENGINE_FIELDS = {"api_key": "api_key", "admin_key": "admin_api_key"}
HIDDEN = "(not shown)"


def credentials():
    """Return the unit's credentials by name; end the process when one is missing."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    found = {}
    for name in os.environ.get("PDSTACK_CREDENTIALS", "").split():
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                found[name] = file.read().strip()
        except OSError as error:
            sys.exit(
                f"launch.py: no credential {name} from systemd ({error.strerror}): nothing starts without its keys"
            )
    return found


def hide_in_logs(secrets):
    """Let no log record carry one of these, whoever writes it and whatever handler is installed later."""
    make = logging.getLogRecordFactory()

    def hide(text):
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def hide_argument(value):
        text = str(value)
        return hide(text) if any(secret in text for secret in secrets) else value

    def record(*args, **kwargs):
        made = make(*args, **kwargs)
        made.msg = hide_argument(made.msg)
        if isinstance(made.args, tuple):
            made.args = tuple(hide_argument(value) for value in made.args)
        elif isinstance(made.args, dict):  # a lone mapping names its values, or is one value
            made.args = {name: hide_argument(value) for name, value in made.args.items()}
        return made

    logging.setLogRecordFactory(record)


GENERATION = ("/v1/", "/generate")


class RefuseWhileStopping:
    """ASGI: answer 503 to what comes after SIGTERM, so that a router sends it elsewhere.

    An engine that drains goes on taking requests. Once it has none it ends its scheduler, and what comes in the seconds
    after that is computed by nobody, and answered when the router gives up or the unit's stop time ends.
    """

    ANSWER = b'{"error": {"message": "this engine is shutting down", "type": "ServiceUnavailable", "code": 503}}'

    def __init__(self, app, stopping):
        self.app = app
        self.stopping = stopping

    async def __call__(self, scope, receive, send):
        asked = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(GENERATION)
        if not (asked and self.stopping()):
            await self.app(scope, receive, send)
            return
        length = str(len(self.ANSWER)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": self.ANSWER})


class HideInAnswers:
    """ASGI: blank the keys in whatever the server tells of itself. Completions carry no configuration and pass."""

    def __init__(self, app, secrets):
        self.app = app
        self.secrets = [secret.encode() for secret in secrets]

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"].startswith(GENERATION):
            await self.app(scope, receive, send)
            return

        async def send_hidden(message):
            body = message.get("body", b"")
            if any(secret in body for secret in self.secrets):
                for secret in self.secrets:
                    body = body.replace(secret, b"*" * len(secret))  # as long as before: its length is announced
                message = {**message, "body": body}
            await send(message)

        await self.app(scope, receive, send_hidden)


def end_progress_lines():
    """Let progress bars write lines: the journal keeps a line that is rewritten back until it ends, with the work."""
    try:
        from tqdm import std
    except ImportError:  # the router has none
        return

    def printer(file):
        def write(text):
            file.write(f"{text}\n")
            file.flush()

        return write

    std.tqdm.status_printer = staticmethod(printer)


def engine(keys):
    """What `python -m sglang.launch_server` does, with the keys."""
    from sglang import launch_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins

    load_plugins()
    arguments = launch_server.prepare_server_args(sys.argv[2:])
    for name, field in ENGINE_FIELDS.items():
        setattr(arguments, field, keys.get(name))
    http_server.app.add_middleware(HideInAnswers, secrets=list(keys.values()))
    # The manager, which SIGTERM tells, is there before the server listens.
    http_server.app.add_middleware(
        RefuseWhileStopping, stopping=lambda: http_server.get_global_state().tokenizer_manager.gracefully_exit
    )
    try:
        launch_server.run_server(arguments)
    finally:
        launch_server.kill_process_tree(os.getpid(), include_parent=False)


CLONE_FILES = 0x400
CLONE = {"x86_64": 56, "aarch64": 220}  # the system call's number


def fork_with_files():
    """Like os.fork, with the table of open files shared: what the parent opens later, the child has too."""
    return ctypes.PyDLL(None).syscall(CLONE[platform.machine()], CLONE_FILES | signal.SIGCHLD, 0, 0, 0, 0)


def set_no_delay(file, port):
    """Set TCP_NODELAY on an open file if it is the socket that listens on a TCP port; say whether it is."""
    try:
        # The file itself: a copy that stayed open would count as one more of the router's, which has a limit of them.
        found = socket.socket(fileno=file)
    except OSError:  # no socket, or closed meanwhile
        return False
    try:
        tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        ours = tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port
        if ours:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bool(ours)
    except OSError:  # closed meanwhile
        return False
    finally:
        found.detach()


def send_at_once(port, timeout_s=1800):
    """Set TCP_NODELAY on the socket that this process will listen on: accepted connections inherit it.

    sglang-router does not, so that on a connection that is used again the first token waits for the acknowledgement of
    the answer's header, which Linux delays by 40 ms, and later tokens come in bunches. It also holds the interpreter
    lock from its start to its end, so that a thread of ours would never run: a process that shares its files
    does it and ends. Nothing depends on it.
    """
    if platform.machine() not in CLONE:
        return
    child = fork_with_files()
    if child > 0:
        os.waitpid(child, 0)
    if child != 0:
        return
    try:
        # A copy of the copy does it: the system's first process waits for that one, the router for none.
        until = time.monotonic() + timeout_s if fork_with_files() == 0 else 0.0
        while time.monotonic() < until:
            if any(set_no_delay(int(file), port) for file in os.listdir("/proc/self/fd")):
                os.write(2, f"launch.py: port {port} sends small packets at once (TCP_NODELAY)\n".encode())
                break
            time.sleep(0.1)
    finally:
        os._exit(0)  # whatever happened: this is a copy of the router's process


def router(keys):
    """What `python -m sglang_router.launch_router` or `smg launch` does, with the keys and the certificate."""
    if "--port" in sys.argv:  # before the program is imported: its threads would not be in the copy of this process
        send_at_once(int(sys.argv[sys.argv.index("--port") + 1]))
    if sys.argv[1] == "smg":
        from smg import launch_router
    else:
        from sglang_router import launch_router

    arguments = launch_router.parse_router_args(sys.argv[2:])
    arguments.api_key = keys.get("api_key")
    if "admin_key" in keys:
        arguments.control_plane_api_keys = [("admin", "admin", keys["admin_key"], "admin")]
    if "tls_cert" in keys:
        folder = os.environ["CREDENTIALS_DIRECTORY"]
        arguments.server_cert_path = os.path.join(folder, "tls_cert")
        arguments.server_key_path = os.path.join(folder, "tls_key")
    launch_router.launch_router(arguments)


if __name__ in ("__main__", "__mp_main__"):
    KEYS = credentials()
    hide_in_logs([value for name, value in KEYS.items() if name in ENGINE_FIELDS])
    end_progress_lines()
if __name__ == "__main__":
    {"engine": engine, "sglang-router": router, "smg": router}[sys.argv[1]](KEYS)
