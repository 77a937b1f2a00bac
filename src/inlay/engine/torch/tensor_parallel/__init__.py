"""One model over several processes of this machine: tensor parallelism.

group.py     collectives of the processes, and commands from the first to the others
sharding.py  a model's share of heads, intermediate elements and vocabulary
commands.py  what the first process tells the others
launch.py    starts the others, and what each of them runs

The first process, rank 0, has the scheduler, the requests and the sampler. The others keep their
share of weights, keys and values, and run each step that they are told, so a step is the same for
all of them.
"""
