// A compiler for CUDA C++ without CUDA: the functions of NVRTC that eaglet calls, over g++ and cuda_host.h. The "machine
// code" is a shared object for the stand-in driver.
//
//   g++ -std=c++17 -O2 -shared -fPIC -DSTANDIN_HEADER='"/path/of/cuda_host.h"' -Wl,-soname,libnvrtc.so.12 nvrtc.cpp
//       -o libnvrtc.so.12
//
// EAGLET_STANDIN_FAULT=compile makes every compilation fail.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6, INTERNAL_ERROR = 11 };

struct Program {
    std::string source, name, log, code;
};

std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// Runs a command with its messages in `log`.
bool run(const std::string& command, const std::string& log) {
    return system((command + " >" + log + " 2>&1").c_str()) == 0;
}

// Only letters that a shell leaves alone.
bool is_plain(const std::string& text) {
    return text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_=+-.") ==
           std::string::npos;
}

int compile(Program* program, const std::string& defines) {
    char folder[] = "/tmp/eaglet-standin-XXXXXX";
    if (!mkdtemp(folder)) {
        return INTERNAL_ERROR;
    }
    const std::string base = folder, text = base + "/kernel.cu.cpp", pre = base + "/pre.cpp", object = base + "/kernel.so",
                      log = base + "/log";
    std::ofstream(text) << program->source;
    int result = COMPILATION;
    // Without macros in the way, the kernels are those words that follow __global__ and stand before a parenthesis.
    if (run("g++ -std=c++17 -E -P -x c++ " + defines + " " + text + " -o " + pre, log)) {
        std::string body = contents(pre);
        // Dynamic shared memory is the header's own array, which a declaration inside a function would hide.
        body = std::regex_replace(body, std::regex("extern\\s+__shared__\\s+float\\s+shared\\s*\\[\\s*\\]\\s*;"), "");
        std::ofstream out(text);
        out << "#include " << '"' << STANDIN_HEADER << '"' << "\n" << body << "\n";
        const std::regex kernel("__global__\\s+void\\s+(?:__launch_bounds__\\s*\\([^)]*\\)\\s*)?(\\w+)\\s*\\(");
        std::set<std::string> names;
        for (std::sregex_iterator found(body.begin(), body.end(), kernel), end; found != end; ++found) {
            names.insert((*found)[1].str());
        }
        for (const std::string& name : names) {
            out << "STANDIN_KERNEL(" << name << ")\n";
        }
        out.close();
        if (run("g++ -std=c++17 -O2 -march=native -w -shared -fPIC -fvisibility=hidden " + text + " -o " + object, log)) {
            program->code = contents(object);
            result = SUCCESS;
        }
    }
    program->log = contents(log);
    run("rm -rf " + base, "/dev/null");
    return result;
}

} // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API nvrtcVersion(int* major, int* minor) {
    *major = 12;
    *minor = 0;
    return SUCCESS;
}

API nvrtcGetNumSupportedArchs(int* count) {
    *count = 3;
    return SUCCESS;
}

API nvrtcGetSupportedArchs(int* numbers) {
    numbers[0] = 80;
    numbers[1] = 86;
    numbers[2] = 90;
    return SUCCESS;
}

API nvrtcCreateProgram(void** program, const char* source, const char* name, int headers, const char* const*,
                       const char* const*) {
    if (headers != 0) {
        return INVALID_INPUT;
    }
    *program = new Program{source, name, "", ""};
    return SUCCESS;
}

API nvrtcDestroyProgram(void** program) {
    delete static_cast<Program*>(*program);
    *program = nullptr;
    return SUCCESS;
}

API nvrtcCompileProgram(void* raw, int count, const char* const* options) {
    Program* program = static_cast<Program*>(raw);
    const char* fault = getenv("EAGLET_STANDIN_FAULT");
    if (fault && strcmp(fault, "compile") == 0) {
        program->log = "told to fail";
        return COMPILATION;
    }
    std::string defines;
    for (int i = 0; i < count; ++i) {
        const std::string option = options[i];
        if (!is_plain(option)) {
            program->log = "an option that no shell should see: " + option;
            return INVALID_OPTION;
        }
        if (option.rfind("-D", 0) == 0) {
            defines += " " + option;
        } else if (option.rfind("--std=", 0) != 0 && option.rfind("--gpu-architecture=sm_", 0) != 0) {
            program->log = "unknown option " + option;
            return INVALID_OPTION;
        }
    }
    return compile(program, defines);
}

API nvrtcGetProgramLogSize(void* program, size_t* bytes) {
    *bytes = static_cast<Program*>(program)->log.size() + 1;
    return SUCCESS;
}

API nvrtcGetProgramLog(void* program, char* log) {
    const std::string& text = static_cast<Program*>(program)->log;
    memcpy(log, text.c_str(), text.size() + 1);
    return SUCCESS;
}

API nvrtcGetCUBINSize(void* program, size_t* bytes) {
    *bytes = static_cast<Program*>(program)->code.size();
    return SUCCESS;
}

API nvrtcGetCUBIN(void* program, char* code) {
    const std::string& text = static_cast<Program*>(program)->code;
    memcpy(code, text.data(), text.size());
    return SUCCESS;
}
