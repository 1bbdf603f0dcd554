"""Stand-ins for the programs of NVIDIA's MPS: they listen, answer, log and end as the real ones are documented to.

The daemon notes the environment that it was started in. `STAND_IN_MPS` in it makes it `die` at once, stay `deaf`, or
be `stubborn`: it ends when told `quit`, or killed.
"""

import sys
from pathlib import Path

_CONTROL = """
import json, os, signal, socket, subprocess, sys, time

pipes, logs = (os.environ.get(f"CUDA_MPS_{name}_DIRECTORY", "/nowhere") for name in ("PIPE", "LOG"))
door, manner = os.path.join(pipes, "control"), os.environ.get("STAND_IN_MPS")


def ask(command):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(door)
        line.sendall(command.encode())
        line.shutdown(socket.SHUT_WR)
        return line.makefile().read()


def log(words):
    stamped = f"[2026-01-01 00:00:00.000 Control {os.getpid():5}] {words}"
    print(stamped, flush=True)
    if os.path.isdir(logs):
        with open(os.path.join(logs, "control.log"), "a") as file:
            print(stamped, file=file)


def serve(listening):
    server = None
    while True:
        with listening.accept()[0] as line:
            command = line.makefile().read().split()
            if command[:1] == ["start_server"] and server is None:
                beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "nvidia-cuda-mps-server")
                server = subprocess.Popen([beside], start_new_session=True)
                log(f"Starting new server {server.pid} for user {command[2]}")
            elif command == ["get_server_list"]:
                line.sendall(f"{server.pid}\\n".encode() if server else b"")
            elif command == ["quit"]:
                if server:
                    server.kill()
                    server.wait()
                os.remove(door)
                return


def main():
    if sys.argv[1:] not in (["-d"], ["-f"]):
        try:
            sys.stdout.write("".join(map(ask, sys.stdin)))
        except OSError:
            sys.exit("Cannot find MPS control daemon process")
        return
    if manner == "die":
        log("Failed to set up")
        log("Cannot bind to the control socket")
        sys.exit(1)
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ask("get_server_list")
        sys.exit("An instance of this daemon is already running")
    except OSError:
        pass
    if manner == "deaf":
        time.sleep(60)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(door)
        listening.listen()
        log(f"Starting control daemon using socket {door}")
        if sys.argv[1] == "-d" and os.fork():
            os._exit(0)
        with open(os.path.join(pipes, "nvidia-cuda-mps-control.pid"), "w") as file:
            file.write(str(os.getpid()))
        with open(os.environ["STAND_IN_JOURNAL"], "a") as journal:
            print(json.dumps([os.getpid(), dict(os.environ)]), file=journal)
        serve(listening)


main()
"""
_SERVER = """
import time

time.sleep(60)
"""


def write_stand_ins(folder: Path) -> None:
    """Writes both programs."""
    for name, code in (("nvidia-cuda-mps-control", _CONTROL), ("nvidia-cuda-mps-server", _SERVER)):
        program = folder / name
        program.write_text(f"#!{sys.executable} -IS\n{code}")
        program.chmod(0o755)
