"""OpenAI's Responses API, served as chats.

`input` makes a chat's messages from items, `checks` refuses fields that are not served, `route`
runs the chat, and `shape` and `items` make the response and its events. Nothing is stored.
"""
