#!/bin/sh
# Two hosts on one machine, joined by a cable, and a command on both:
#   unshare --map-root-user --mount --net --pid --fork --kill-child sh two_hosts.sh torchrun ...
# torchrun finds its node's number in PET_NODE_RANK; host 0 has the address 10.77.0.1. A number on
# stdin takes the link of host 1 down for so many seconds. When both commands have ended, so does
# this, and fails if one of them has failed. Namespaces end with their processes.
set -e
mount -t tmpfs none /run # where ip keeps the names of namespaces
ip netns add host0
ip netns add host1
ip -n host0 link add eth0 type veth peer name eth0 netns host1
for host in 0 1; do
  ip -n host$host addr add 10.77.0.$((host + 1))/24 dev eth0
  ip -n host$host link set lo up
  ip -n host$host link set eth0 up
done
commands=
for host in 0 1; do
  PET_NODE_RANK=$host PET_LOG_DIR=host$host GLOO_SOCKET_IFNAME=eth0 ip netns exec host$host "$@" &
  commands="$commands $!"
done
exec 3<&0 # what runs behind has no stdin of its own
while read -r seconds <&3; do
  ip -n host1 link set eth0 down
  for host in 0 1; do
    echo "host $host: $(ip -n host$host -o link show eth0 | grep -o '<.*>')"
  done
  sleep "$seconds"
  ip -n host1 link set eth0 up
done &
reader=$! status=0
for command in $commands; do
  wait "$command" || status=$?
done
kill "$reader" 2>/dev/null || true
exit $status
