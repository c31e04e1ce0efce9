"""The table of a directory in Redis, and the scripts that change and read it, each in one step.

::

    SPACE:uid:ffn.3.14     text     the endpoint                            expires with the announcement
    SPACE:below:ffn        sorted   3  by the time at which the last below ffn.3 expires
    SPACE:below:ffn.3      sorted   14
    SPACE:claim:ffn.3.14   text     the claimer                             expires with the claim

``SPACE`` is a name in braces, so that a cluster would keep all of it in one place. Times are milliseconds by Redis'
own clock. The sets answer "which indices follow this prefix" without a walk over all keys; an index that has expired
is left out by its time, and a set expires with its last.
"""

from __future__ import annotations

from anabranch.transport.directory.redis_link import Script

__all__ = ["ACTIVE", "ANNOUNCE", "CLAIM", "LOOKUP", "RELEASE", "TIME", "WITHDRAW"]

_CLOCK = """
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

# The leaf first: each level reads the one below.
_INDEX = (
    _CLOCK
    + """
local function last_below(space, name, at)
  local last = -1
  local left = redis.call('PTTL', space .. ':uid:' .. name)
  if left > 0 then last = at + left end
  local found = redis.call('ZREVRANGE', space .. ':below:' .. name, 0, 0, 'WITHSCORES')
  if found[2] and tonumber(found[2]) > last then last = tonumber(found[2]) end
  return last
end

local function index(space, uid, at)
  local name = uid
  while true do
    local prefix, following = string.match(name, '^(.*)%.(%d+)$')
    if not prefix then return end
    local below = space .. ':below:' .. prefix
    local last = last_below(space, name, at)
    if last > at then redis.call('ZADD', below, string.format('%d', last), following)
    else redis.call('ZREM', below, following) end
    redis.call('ZREMRANGEBYSCORE', below, '-inf', at)
    local longest = redis.call('ZREVRANGE', below, 0, 0, 'WITHSCORES')
    if longest[2] then redis.call('PEXPIREAT', below, string.format('%d', longest[2])) end
    name = prefix
  end
end
"""
)

TIME = Script(_CLOCK + "return now()")
"""() -> milliseconds since the epoch."""

ANNOUNCE = Script(
    _INDEX
    + """
local space, endpoint, ttl, at = ARGV[1], ARGV[2], ARGV[3], now()
for i = 4, #ARGV do
  redis.call('SET', space .. ':uid:' .. ARGV[i], endpoint, 'PX', ttl)
  redis.call('DEL', space .. ':claim:' .. ARGV[i])
  index(space, ARGV[i], at)
end
return 0
"""
)
"""(space, endpoint, ttl, then uids)"""

WITHDRAW = Script(
    _INDEX
    + """
local space, endpoint, at = ARGV[1], ARGV[2], now()
for i = 3, #ARGV do
  local key = space .. ':uid:' .. ARGV[i]
  if redis.call('GET', key) == endpoint then
    redis.call('DEL', key)
    index(space, ARGV[i], at)
  end
end
return 0
"""
)
"""(space, endpoint, then uids)"""

LOOKUP = Script(
    """
local found = {}
for i = 2, #ARGV do
  found[#found + 1] = redis.call('GET', ARGV[1] .. ':uid:' .. ARGV[i])
end
return found
"""
)
"""(space, then uids) -> the endpoint of each"""

ACTIVE = Script(
    _CLOCK
    + """
local found, at = {}, string.format('(%d', now())
for i = 2, #ARGV do
  found[#found + 1] = redis.call('ZRANGEBYSCORE', ARGV[1] .. ':below:' .. ARGV[i], at, '+inf')
end
return found
"""
)
"""(space, then prefixes) -> the indices that follow each"""

CLAIM = Script(
    """
local space, shared, claimer, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local free = {}
for i = 5, #ARGV do
  local taken = redis.call('EXISTS', space .. ':uid:' .. ARGV[i], shared .. ':uid:' .. ARGV[i]) > 0
  local claim = space .. ':claim:' .. ARGV[i]
  local before = redis.call('GET', claim)
  if not taken and (not before or before == claimer) then
    redis.call('SET', claim, claimer, 'PX', ttl)
    free[#free + 1] = ARGV[i]
  end
end
return free
"""
)
"""(space, the space of every job, claimer, ttl, then uids) -> those that are now the claimer's"""

RELEASE = Script(
    """
for i = 3, #ARGV do
  local claim = ARGV[1] .. ':claim:' .. ARGV[i]
  if redis.call('GET', claim) == ARGV[2] then redis.call('DEL', claim) end
end
return 0
"""
)
"""(space, claimer, then uids)"""
