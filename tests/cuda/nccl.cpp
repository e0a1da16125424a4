// NCCL without GPUs: the functions that eaglet calls, over sockets of one host, on the stand-in driver's streams.
//
//   g++ -std=c++17 -O2 -shared -fPIC -pthread -Wl,-soname,libnccl.so.2 nccl.cpp -o libnccl.so.2 -ldl
//
// The process that makes a unique id runs a hub to which all ranks connect. Every collective goes through the hub, which
// adds in the order of ranks. As with NCCL, nothing fails by itself when a rank dies: the others wait until they abort.
//
// The environment decides what goes wrong:
//   EAGLET_STANDIN_NCCL=error       the others of a dead rank see a remote error instead of waiting
//   EAGLET_STANDIN_NCCL=stuck       an abort never returns

#include <arpa/inet.h>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <mutex>
#include <netinet/tcp.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum Operation { ALL_REDUCE, ALL_GATHER, BROADCAST };
const uint32_t MAGIC = 0x6c63636e;

struct UniqueId {
    char bytes[128];
};
struct Address {
    uint32_t magic;
    uint16_t port;
    uint16_t unused;
    uint64_t nonce;
};
struct Hello {
    uint32_t magic;
    int32_t rank, ranks;
    uint32_t unused;
    uint64_t nonce;
};
struct Request {
    int32_t operation, type, root, unused;
    uint64_t count, sequence;
};

bool has(const char* word) {
    const char* text = getenv("EAGLET_STANDIN_NCCL");
    return text && strcmp(text, word) == 0;
}

size_t bytes_of(int type) {
    return type <= 1 ? 1 : type == 2 || type == 3 || type == 7 ? 4 : type == 6 || type == 9 ? 2 : 8;
}

bool send_all(int socket, const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t sent = send(socket, from, bytes, MSG_NOSIGNAL);
        if (sent <= 0) {
            return false;
        }
        from += sent;
        bytes -= size_t(sent);
    }
    return true;
}

bool receive_all(int socket, void* data, size_t bytes) {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
        const ssize_t got = recv(socket, to, bytes, 0);
        if (got <= 0) {
            return false;
        }
        to += got;
        bytes -= size_t(got);
    }
    return true;
}

void close_all(const std::vector<int>& sockets) {
    for (int socket : sockets) {
        if (socket >= 0) {
            close(socket);
        }
    }
}

// Serves one group of ranks until one of them is gone.
void serve(int listener, uint64_t nonce) {
    std::vector<int> ranks;
    size_t met = 0;
    while (ranks.empty() || met < ranks.size()) {
        const int socket = accept(listener, nullptr, nullptr);
        Hello hello;
        if (socket < 0) {
            return close_all(ranks);
        }
        if (!receive_all(socket, &hello, sizeof(hello)) || hello.magic != MAGIC || hello.nonce != nonce ||
            hello.ranks < 1 || hello.rank < 0 || hello.rank >= hello.ranks ||
            (!ranks.empty() && (ranks.size() != size_t(hello.ranks) || ranks[size_t(hello.rank)] >= 0))) {
            close(socket);
            continue;
        }
        ranks.resize(size_t(hello.ranks), -1);
        ranks[size_t(hello.rank)] = socket;
        ++met;
    }
    close(listener);
    const char ready = 1;
    for (int socket : ranks) {
        send_all(socket, &ready, 1);
    }
    for (bool alive = true; alive;) {
        std::vector<Request> requests(ranks.size());
        std::vector<std::vector<char>> given(ranks.size());
        for (size_t rank = 0; alive && rank < ranks.size(); ++rank) {
            Request& request = requests[rank];
            alive = receive_all(ranks[rank], &request, sizeof(request));
            if (!alive) {
                break;
            }
            const Request& first = requests[0];
            if (request.operation != first.operation || request.type != first.type || request.root != first.root ||
                request.count != first.count || request.sequence != first.sequence) {
                fprintf(stderr, "stand-in NCCL: ranks 0 and %zu ask for different collectives\n", rank);
                alive = false;
                break;
            }
            given[rank].resize(request.count * bytes_of(request.type));
            alive = receive_all(ranks[rank], given[rank].data(), given[rank].size());
        }
        if (!alive) {
            break;
        }
        const Request& request = requests[0];
        std::vector<char> result;
        if (request.operation == ALL_REDUCE) {
            result = given[0];
            for (size_t rank = 1; rank < ranks.size(); ++rank) {
                for (uint64_t i = 0; i < request.count; ++i) {
                    float sum, more;
                    memcpy(&sum, &result[4 * i], 4);
                    memcpy(&more, &given[rank][4 * i], 4);
                    sum += more;
                    memcpy(&result[4 * i], &sum, 4);
                }
            }
        } else if (request.operation == ALL_GATHER) {
            for (const std::vector<char>& part : given) {
                result.insert(result.end(), part.begin(), part.end());
            }
        } else {
            result = given[size_t(request.root)];
        }
        for (int socket : ranks) {
            send_all(socket, result.data(), result.size());
        }
    }
    // A rank is gone. NCCL's other ranks would not know.
    if (!has("error")) {
        for (;;) {
            pause();
        }
    }
    close_all(ranks);
}

struct Task {
    Request request;
    const void* from;
    void* to;
    void* stream;
};

typedef void (*StreamHook)(void*);

struct Communicator {
    int rank, ranks, socket = -1;
    Address address;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Task> tasks;
    std::atomic<int> state{IN_PROGRESS};
    bool aborted = false;
    uint64_t sequence = 0;
    StreamHook begin, end;
    std::thread worker;

    // Something is broken: says so, or says nothing for ever, as NCCL may.
    void break_down(int code) {
        if (has("error")) {
            state = code;
        }
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return aborted; });
    }

    bool meet() {
        sockaddr_in where = {};
        where.sin_family = AF_INET;
        where.sin_port = htons(address.port);
        where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const Hello hello = {MAGIC, rank, ranks, 0, address.nonce};
        char ready;
        const int on = 1;
        setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        return connect(socket, reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0 &&
               send_all(socket, &hello, sizeof(hello)) && receive_all(socket, &ready, 1);
    }

    bool perform(const Task& task) {
        const size_t given = task.request.count * bytes_of(task.request.type);
        const size_t taken = given * (task.request.operation == ALL_GATHER ? size_t(ranks) : 1);
        return send_all(socket, &task.request, sizeof(task.request)) && send_all(socket, task.from, given) &&
               receive_all(socket, task.to, taken);
    }

    void work() {
        if (!meet()) {
            break_down(SYSTEM_ERROR);
            return;
        }
        state = SUCCESS;
        for (;;) {
            Task task;
            {
                std::unique_lock<std::mutex> guard(lock);
                changed.wait(guard, [&] { return aborted || !tasks.empty(); });
                if (aborted) {
                    return;
                }
                task = tasks.front();
            }
            if (!perform(task)) {
                break_down(REMOTE_ERROR);
                return;
            }
            std::unique_lock<std::mutex> guard(lock);
            tasks.pop_front();
            guard.unlock();
            end(task.stream);
        }
    }

    int add(Request request, const void* from, void* to, void* stream) {
        std::unique_lock<std::mutex> guard(lock);
        if (state == IN_PROGRESS) {
            fprintf(stderr, "stand-in NCCL: a collective was asked for before the ranks have met\n");
            return INVALID_ARGUMENT;
        }
        if (state != SUCCESS) {
            return state;
        }
        request.sequence = sequence++;
        begin(stream);
        tasks.push_back({request, from, to, stream});
        changed.notify_all();
        return SUCCESS;
    }
};

} // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API ncclGetVersion(int* version) {
    *version = 22700;
    return SUCCESS;
}

API ncclGetUniqueId(UniqueId* id) {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in where = {};
    where.sin_family = AF_INET;
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(where);
    if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&where), sizeof(where)) != 0 ||
        listen(listener, 64) != 0 || getsockname(listener, reinterpret_cast<sockaddr*>(&where), &bytes) != 0) {
        return SYSTEM_ERROR;
    }
    Address address = {MAGIC, ntohs(where.sin_port), 0, 0};
    FILE* random = fopen("/dev/urandom", "rb");
    if (!random || fread(&address.nonce, sizeof(address.nonce), 1, random) != 1) {
        return SYSTEM_ERROR;
    }
    fclose(random);
    memset(id, 0, sizeof(*id));
    memcpy(id, &address, sizeof(address));
    std::thread(serve, listener, address.nonce).detach();
    return SUCCESS;
}

API ncclCommInitRankConfig(void** out, int ranks, UniqueId id, int rank, const void* raw) {
    struct {
        size_t size;
        uint32_t magic, version;
        int blocking;
    } config;
    memcpy(&config, raw, sizeof(config));
    Address address;
    memcpy(&address, &id, sizeof(address));
    if (config.magic != 0xcafebeefu || config.blocking != 0 || address.magic != MAGIC || rank < 0 || rank >= ranks) {
        return INVALID_ARGUMENT;
    }
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void* begin = driver ? dlsym(driver, "standin_stream_begin") : nullptr;
    void* end = driver ? dlsym(driver, "standin_stream_end") : nullptr;
    if (!begin || !end) {
        fprintf(stderr, "stand-in NCCL: the driver is not the stand-in\n");
        return SYSTEM_ERROR;
    }
    Communicator* communicator = new Communicator;
    communicator->rank = rank;
    communicator->ranks = ranks;
    communicator->address = address;
    communicator->begin = reinterpret_cast<StreamHook>(begin);
    communicator->end = reinterpret_cast<StreamHook>(end);
    communicator->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    communicator->worker = std::thread(&Communicator::work, communicator);
    *out = communicator;
    return IN_PROGRESS;
}

API ncclCommGetAsyncError(void* raw, int* error) {
    *error = static_cast<Communicator*>(raw)->state;
    return SUCCESS;
}

API ncclCommAbort(void* raw) {
    while (has("stuck")) {
        pause();
    }
    Communicator* communicator = static_cast<Communicator*>(raw);
    {
        std::lock_guard<std::mutex> guard(communicator->lock);
        communicator->aborted = true;
        communicator->changed.notify_all();
    }
    shutdown(communicator->socket, SHUT_RDWR);
    communicator->worker.join();
    close(communicator->socket);
    for (const Task& task : communicator->tasks) {
        communicator->end(task.stream); // with whatever lies in the buffers
    }
    delete communicator;
    return SUCCESS;
}

API ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, void* communicator, void* stream) {
    if (type != 7 || operation != 0) {
        return INVALID_ARGUMENT; // sums of f32 are all that eaglet asks for
    }
    return static_cast<Communicator*>(communicator)->add({ALL_REDUCE, type, 0, 0, count, 0}, from, to, stream);
}

API ncclAllGather(const void* from, void* to, size_t count, int type, void* communicator, void* stream) {
    return static_cast<Communicator*>(communicator)->add({ALL_GATHER, type, 0, 0, count, 0}, from, to, stream);
}

API ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* raw, void* stream) {
    Communicator* communicator = static_cast<Communicator*>(raw);
    if (root < 0 || root >= communicator->ranks) {
        return INVALID_ARGUMENT;
    }
    return communicator->add({BROADCAST, type, root, 0, count, 0}, from, to, stream);
}
