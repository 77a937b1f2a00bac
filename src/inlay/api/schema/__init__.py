"""Types of requests that all APIs share, as msgspec structs.

Unknown fields are ignored, null is treated as absent, and a boolean is never taken for an integer.
A struct holds the request as it was sent; the routes check it against the model and the settings.
Fields that are known and not served are declared as `Unserved` (`unserved.py`) and refused.
"""
