#!/bin/sh
# two_machines.sh — what to type on two machines, tried on one: two network namespaces joined by a cable, a rank in each (root, iproute2).
#
#   sudo sh examples/two_machines.sh examples/images.py --steps 20
#
# On real machines, give each its --node-rank, the first one's address, and the name of the network interface.
set -eu
cd "$(dirname "$0")/.."
first="interlace-first-$$" second="interlace-second-$$"
remove() { ip netns delete "$first" 2>/dev/null || true; ip netns delete "$second" 2>/dev/null || true; }
trap remove EXIT INT TERM
ip netns add "$first"
ip netns add "$second"
ip link add net0 netns "$first" type veth peer name net0 netns "$second"
ip -n "$first" address add 10.78.0.1/24 dev net0
ip -n "$second" address add 10.78.0.2/24 dev net0
for machine in "$first" "$second"; do ip -n "$machine" link set lo up; ip -n "$machine" link set net0 up; done

export GLOO_SOCKET_IFNAME=net0
run() { # machine, node rank, script...
  machine=$1 node=$2; shift 2
  ip netns exec "$machine" "${PYTHON:-python3}" -m torch.distributed.run --nnodes 2 --node-rank "$node" --nproc-per-node 1 \
    --master-addr 10.78.0.1 --master-port 29500 "$@"
}
run "$second" 1 "$@" &
other=$!
run "$first" 0 "$@"
wait "$other"
