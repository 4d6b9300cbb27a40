"""A child that crashes once, and then goes on behind the row that was it."""

import os
import signal

from linattn.lab.bench.decoding.rows import DecodingRow
from linattn.lab.bench.decoding.run import plan_of


def decoding_that_crashes_once(line, measure, config, result):
    for mechanism, context, batch, mode in plan_of(config, result):
        row = DecodingRow(mechanism, context=context, batch=batch, mode=mode, run=result.run)
        line.send("begin", row)
        if mechanism == "softmax":
            os.kill(os.getpid(), signal.SIGKILL)
        row.median_ms = 1.0
        line.send("row", row)
