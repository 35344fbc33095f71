"""A node with one light rank and its sentinel, where it is started: `light_node.py NODE SETTINGS`.

Writes JSON, a line each: the sentinel's port, the job's record when the rank has it, and the sentinel's exit code. A
line on stdin has the rank leave; the end of stdin ends it all.
"""

import contextlib
import json
import select
import socket
import sys

from tests.support.sentinels import PATIENCE_S, LightNode, LightRank

node, settings = int(sys.argv[1]), json.loads(sys.argv[2])
if settings.pop("is_old_kernel"):
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.IPPROTO_TCP, 44, 1000)
        sys.exit("TCP_RTO_MAX_MS is known, and should not be")
rank = LightRank(node, settings["timeout_s"])
light = LightNode(node, [rank], settings)
try:
    print(json.dumps({"port": light.port}), flush=True)
    assert rank._process.stdout is not None
    ready, _, _ = select.select([rank._process.stdout, sys.stdin], [], [])
    if sys.stdin not in ready:
        print(json.dumps({"record": rank.record().as_dict()}), flush=True)
    elif sys.stdin.readline():
        rank.tell("leave")
        rank.wait()
    else:
        sys.exit("is ended")
    print(json.dumps({"ended": light.sentinel.wait(2 * PATIENCE_S)}), flush=True)
finally:
    rank.close()
    light.sentinel.kill()
