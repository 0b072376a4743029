#!/usr/bin/env python3
"""A `process` operator that answers each frame with its size, as text. See agent/src/workers/PROTOCOL.md."""
import json, struct, sys

def receive():
    lengths = sys.stdin.buffer.read(8)
    if len(lengths) < 8:
        sys.exit()  # the agent has closed our input
    header, payload = struct.unpack(">II", lengths)
    return json.loads(sys.stdin.buffer.read(header)), sys.stdin.buffer.read(payload)

def answer(header, payload=b""):
    header = json.dumps(header).encode()
    sys.stdout.buffer.write(struct.pack(">II", len(header), len(payload)) + header + payload)
    sys.stdout.buffer.flush()

answers = {"start": "ready", "reset": "done"}  # a real operator loads its model on start
while True:
    request, payload = receive()
    if request["do"] == "frame":
        answer({"is": "output", "content": "text"}, f"{len(payload)} bytes".encode())
    else:
        answer({"is": answers.get(request["do"], "error"), "message": "this operator keeps no state"})
