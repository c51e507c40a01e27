"""The process from which beds are forked: it imports torch once, has one thread, and watches its
parent.

It is started as `python -m moesaic_testbed.launcher` and not forked from the parent, because a fork
would lose the parent's threads (of OpenMP and Gloo).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import wait

from moesaic_testbed.bed import Bed
from moesaic_testbed.kernel import (
    NEW_MOUNTS,
    NEW_NET,
    NEW_PROCESSES,
    become_root_of_new_user_namespace,
    die_with_parent,
    may_configure_networks,
    name_hosts,
    own_mounts,
    unshare,
)
from moesaic_testbed.messages import Answer, Channel, Failure
from moesaic_testbed.supervisor import Supervisor
from moesaic_testbed.wiring import WiringError, node_address, node_name


def main(line: int, parent: int, with_torch: bool) -> None:
    """Fork a bed for every request until the parent ends.

    Args:
        line: file descriptor of the socket to the parent.
        parent: process number of the parent.
        with_torch: import torch, for beds that run functions; commands import their own.
    """
    os.setpgid(0, 0)  # Ctrl-C is the parent's to handle
    try:
        watch = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() != parent:
        return
    # nothing reads the exit codes of the processes around beds
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = Channel(socket.socket(fileno=line))
    if with_torch:
        _import_torch()
    while True:
        ready = wait([requests.connection, watch])
        if watch in ready:
            return
        try:
            bed, files = requests.receive()
        except EOFError:
            return
        _fork_bed(bed, files, requests, watch)


def _import_torch() -> None:
    """Import torch before processes are forked."""
    import torch.distributed

    torch.set_num_threads(1)


def _fork_bed(bed: Bed, files: list[int], requests: Channel, watch: int) -> None:
    """Fork a process that creates the namespaces of a bed and then waits for the bed's process
    number 1.

    Args:
        bed: the cluster to emulate.
        files: the bed's socket, a pipe that closes when the whole bed is gone, standard output,
            standard error.
        requests: the socket of this process, which the child closes.
        watch: handle of the parent process, which the child closes.
    """
    if os.fork():  # this process, the parent
        for file in files:
            os.close(file)
        return
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        os.close(watch)
        bed_socket, gone, *output = files
        channel = Channel(socket.socket(fileno=bed_socket))
        for target, source in zip((1, 2), output):
            os.dup2(source, target)
            os.close(source)
        _be_bed(channel, bed, gone)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _be_bed(channel: Channel, bed: Bed, gone: int) -> None:
    """Be the process that holds a bed, until the connection closes: enter namespaces of its own,
    fork process number 1, the supervisor, and wait for it.

    Args:
        channel: the bed's socket.
        bed: the cluster to emulate.
        gone: writing end of a pipe. The supervisor and its ranks do not need it: it closes with
            this process, the last one of the bed.
    """
    try:
        if not may_configure_networks():
            become_root_of_new_user_namespace()
        unshare(NEW_MOUNTS | NEW_PROCESSES | NEW_NET)
    except OSError as error:
        channel.send(Answer(failure=Failure(reason=f"no namespaces for this user ({error})")))
        return
    supervisor_pid = os.fork()
    if supervisor_pid:
        channel.close()
        os.waitpid(supervisor_pid, 0)
        return
    die_with_parent()
    os.close(gone)
    try:
        if own_mounts():
            name_hosts({node_address(node): node_name(node) for node in range(bed.nodes)})
        supervisor = Supervisor(channel, bed)
    except (WiringError, OSError) as error:
        channel.send(Answer(failure=Failure(reason=str(error))))
        return
    channel.send(Answer())
    supervisor.serve()


if __name__ == "__main__":
    _, line_text, parent_text, mode = sys.argv
    main(int(line_text), int(parent_text), with_torch=mode == "torch")
    os._exit(0)  # skips the teardown of torch, which is slow
