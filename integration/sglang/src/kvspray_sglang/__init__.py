# SPDX-License-Identifier: Apache-2.0
"""kvspray's side inside SGLang: its disaggregation back end (KVManager, sender, receiver) over the package ``kvspray``, which has the
socket, the board and the leases. It holds no code yet; the interfaces that it will use are those of ``kvspray.client``, as in
``kvspray_vllm``.
"""
