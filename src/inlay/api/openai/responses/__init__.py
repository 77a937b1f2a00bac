"""OpenAI's Responses API, served as chats.

`input` refuses fields that are not served and makes a chat's messages from items, `route` runs the
chat, and `shape` and `items` make the response and its events. Nothing is stored.
"""
