"""What hosts of a box send to each other in tests: `traffic.py count|packets|take|send HOST [NUMBER]`."""

import socket
import sys
import time

PORT = 5000


def count(host):
    """Says how many packets arrive before the last."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)  # None gets lost while this process waits.
        receiver.bind((host, PORT))
        print("ready", flush=True)
        number = 0
        while receiver.recv(100) != b"last":
            number += 1
        print(number, flush=True)


def packets(host, number):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(number):
            sender.sendto(b"packet", (host, PORT))
            time.sleep(0.0005)
        for _ in range(50):  # One of them may get lost.
            sender.sendto(b"last", (host, PORT))
            time.sleep(0.002)


def take(host):
    """Says how many bytes come over one connection."""
    with socket.create_server((host, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        number = 0
        while part := connection.recv(1 << 20):
            number += len(part)
        print(number, flush=True)


def send(host, number):
    """Says how many seconds it took to connect, which is one packet there and one back."""
    started = time.monotonic()
    with socket.create_connection((host, PORT), 20) as connection:
        print(time.monotonic() - started)
        connection.sendall(bytes(number))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
