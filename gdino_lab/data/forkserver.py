"""Imported by the process that forks a rank's data processes, and by nothing else.

Ctrl-C in a terminal, or a scheduler's SIGTERM, reaches every process of a run. The rank still needs its data to finish the
step and save, and a data process ends when the server that forked it does: so neither hears of it.
"""

import signal

from gdino_lab.data.loading import STOP_SIGNALS

for number in STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
