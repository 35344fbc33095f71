"""What must not differ between nodes."""

from importlib.metadata import version

from grpo.place.same_everywhere import read_settings


def test_read_settings_omits_node_specific_variables():
    own = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG_FILE": "x", "GLOO_SOCKET_IFNAME": "eth1", "A": "b"}
    own |= {"NCCL_HOSTID": "n1", "NCCL_TOPO_FILE": "/etc/topo-n1.xml"}
    settings = dict(read_settings({**own, "NCCL_NET": "IB"}))
    assert settings["NCCL_NET"] == "IB"
    assert settings["torch"] == version("torch")
    assert not own.keys() & settings.keys()
