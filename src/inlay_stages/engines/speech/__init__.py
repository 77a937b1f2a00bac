"""Speech of Qwen2.5-Omni's family: the talker, and the vocoder behind it, one in each worker.

`talker.py` makes codes of sound of what the thinker reads and says, `vocoder.py` sound of codes,
piece by piece; both with transformers' modules. `loading.py` loads one of them, `engine.py` runs
the requests of either in turn, `job.py` is one of these.
"""
