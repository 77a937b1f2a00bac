"""Authentication, tenants, rate limits and quotas.

`ApiKeys` maps the `Authorization` header to a `Caller`: its `Tenant`, limits and admin right.
`Clients` counts each client's running requests and bytes, and holds its token bucket. Where no key
is required, a client is an IP address (an IPv6 /64).

Keys are stored as hashes, and no message quotes a key.
"""
