"""`/v1/decisions`: probabilities of the options of questions about one state.

prompt.py   the state as a chat, the questions behind it
reads.py    the reads of a request, and answers from their probabilities
route.py    the route
"""
